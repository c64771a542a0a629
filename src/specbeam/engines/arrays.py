"""Names for the types of arrays and tensors that several engines pass on; dimensions of one name are equal in a call."""

import numpy as np
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

AnyArray = Shaped[np.ndarray, "..."]
Floats = Float32[np.ndarray, "..."]
Dense = Float[np.ndarray, "columns depth"]  # a matrix, of which `panels` makes Panels
Panels = Shaped[np.ndarray, "panels words"]

Integers = Int64[np.ndarray, " n"]
TokenIds = Int64[np.ndarray, " length"]
PassInputs = Int64[np.ndarray, "3 batch width"]  # tokens, positions and slots of a padded pass
WindowSizes = Int64[np.ndarray, " kinds"]  # tokens that each kind of layer looks at; 0: all

Vector = Float32[np.ndarray, " hidden"]
States = Float32[np.ndarray, "n hidden"]
OwnStates = Float32[np.ndarray, "_ hidden"]  # of one of several sessions or sources
Tapped = Float32[np.ndarray, "n tapped"]
LogitRows = Float32[np.ndarray, "n vocab"]
Features = Float32[np.ndarray, "channels frames"]  # of a window of audio

IntegerTensor = Int64[Tensor, " n"]
RowTensor = Float[Tensor, "rows width"]
JoinedRows = Float[Tensor, "rows all"]  # of several heads or matrices side by side
HeadRows = Float[Tensor, "rows heads size"]
PrefixRows = Float[Tensor, "heads prefix size"]  # keys or values
SourceStates = Float[Tensor, "1 frames size"]
