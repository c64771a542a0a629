"""Array and tensor types shared by engines. Dimensions with the same name are equal within a call."""

import numpy as np
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

AnyArray = Shaped[np.ndarray, "..."]
Floats = Float32[np.ndarray, "..."]
Dense = Float[np.ndarray, "columns depth"]  # a matrix before it is packed into Panels
Panels = Shaped[np.ndarray, "panels words"]

Integers = Int64[np.ndarray, " n"]
TokenIds = Int64[np.ndarray, " length"]
PassInputs = Int64[np.ndarray, "3 batch width"]  # tokens, positions and slots of a padded pass
WindowSizes = Int64[np.ndarray, " kinds"]  # sliding window of each kind of layer in tokens; 0: all tokens

Vector = Float32[np.ndarray, " hidden"]
States = Float32[np.ndarray, "n hidden"]
OwnStates = Float32[np.ndarray, "_ hidden"]  # states of a single session or source among several
Tapped = Float32[np.ndarray, "n tapped"]
LogitRows = Float32[np.ndarray, "n vocab"]
Features = Float32[np.ndarray, "channels frames"]  # features of a window of audio

IntegerTensor = Int64[Tensor, " n"]
RowTensor = Float[Tensor, "rows width"]
JoinedRows = Float[Tensor, "rows all"]  # outputs of several heads or matrices, concatenated
HeadRows = Float[Tensor, "rows heads size"]
PrefixRows = Float[Tensor, "heads prefix size"]  # keys or values
SourceStates = Float[Tensor, "1 frames size"]
