"""TRAINING of draft models and heads on texts that the target draws, resumable, with held-out acceptance.

`drawing.py` draws trees with the target's laws (`trees.py`), `lessons.py` stores them in a folder and holds some out,
`batches.py` makes batches. `course.py` runs a training with the loop in `fitting.py` and the losses in `losses.py`. Draft
models (`draft.py`) and heads (`heads.py`, each kind in its own file) are trained; `teacher.py` gives heads the target's
hidden states, `plan.py` has their sizes. `coral.py` trains a copy of the target to predict a window of tokens ahead,
`dbllm.py` one with weights of 2 bits.

A memory is trained on long texts (`hmt.py`, with the loop in `remembering.py`).
"""

from specbeam.lab.train.coral import train_coral
from specbeam.lab.train.course import Trained
from specbeam.lab.train.dbllm import DeviationLoss, train_dbllm
from specbeam.lab.train.draft import train_draft
from specbeam.lab.train.drawing import DrawPlan
from specbeam.lab.train.fitting import Schedule
from specbeam.lab.train.heads import train_head
from specbeam.lab.train.hmt import TrainedMemory, train_hmt
from specbeam.lab.train.remembering import MemoryDocument, MemorySchedule

__all__ = [
    "DeviationLoss",
    "DrawPlan",
    "MemoryDocument",
    "MemorySchedule",
    "Schedule",
    "Trained",
    "TrainedMemory",
    "train_coral",
    "train_dbllm",
    "train_draft",
    "train_head",
    "train_hmt",
]
