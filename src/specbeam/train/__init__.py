"""TRAINING of what drafts: on texts that the target itself draws, resumable, with held-out acceptance.

`trees.py` holds what the target drew and its laws there, `drawing.py` has it drawn, `batches.py` makes batches of it,
`fitting.py` is the loop, `losses.py` what it lowers, and each kind of draft has a file of its own (`draft.py`).
"""

from specbeam.train.course import Trained
from specbeam.train.draft import train_draft
from specbeam.train.drawing import DrawPlan
from specbeam.train.fitting import Schedule

__all__ = ["DrawPlan", "Schedule", "Trained", "train_draft"]
