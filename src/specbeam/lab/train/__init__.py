"""TRAINING of draft models and heads, on texts that the target draws, resumable, with held-out acceptance.

`trees.py` has the trees that the target drew, with its laws; `drawing.py` draws them, `lessons.py` stores them in a folder,
some of them held out, `batches.py` makes batches. `course.py` runs a training with the loop in `fitting.py` and the losses
in `losses.py`. Trainable are draft models (`draft.py`) and heads (`heads.py`), each kind of head in its own file;
`teacher.py` gives heads the target's hidden states, `plan.py` has their shape. `coral.py` trains a copy of the target to
predict a window of tokens ahead.

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
