"""TRAINING of what drafts, on texts that the target itself draws, resumable, with held-out acceptance.

`trees.py` holds what the target drew and its laws there, `drawing.py` has it drawn, `lessons.py` keeps it in a folder, part
of it held out, `batches.py` makes batches of it. `course.py` teaches whoever learns, by the loop in `fitting.py` and what
`losses.py` says is to be lowered. Who learns: draft models (`draft.py`) and heads (`heads.py`), each kind with a file of its
own; `teacher.py` gives heads the target's hidden states, `plan.py` says what they are to be. `coral.py` teaches a copy of
the target itself a window of tokens ahead.

A memory learns from long texts instead (`hmt.py`, by the loop in `remembering.py`).
"""

from specbeam.lab.train.coral import train_coral
from specbeam.lab.train.course import Trained
from specbeam.lab.train.draft import train_draft
from specbeam.lab.train.drawing import DrawPlan
from specbeam.lab.train.fitting import Schedule
from specbeam.lab.train.heads import train_head
from specbeam.lab.train.hmt import TrainedMemory, train_hmt
from specbeam.lab.train.remembering import MemoryDocument, MemorySchedule

__all__ = [
    "DrawPlan",
    "MemoryDocument",
    "MemorySchedule",
    "Schedule",
    "Trained",
    "TrainedMemory",
    "train_coral",
    "train_draft",
    "train_head",
    "train_hmt",
]
