"""Types of the arrays of draft heads. Axes of the same name are equal in a call; `*rows` are any number of axes."""

import numpy as np
from jaxtyping import Bool, Float, Int64
from torch import Tensor

Rows = Float[Tensor, "*rows width"]  # hidden states, features or embeddings, one per row
PerRow = Int64[Tensor, "*rows"]  # a token or position per row
TargetStates = Float[Tensor, "*rows states"]  # hidden states of the target at all taps, concatenated
Odds = Float[Tensor, "*rows"]
States = Float[Tensor, "*rows state"]  # states that a head passes from draft to draft
StatesAbove = Float[Tensor, "*rows above"]  # the parents' states
Heads = Float[Tensor, "*rows heads size"]  # queries, keys or values by head of attention
Angles = tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows size"]]  # cosines and sines of positions
Logits = Float[Tensor, "_ draft_vocab"]
Blocks = Float[Tensor, "*rows each _"]  # rows of blocks
TokenMap = Int64[Tensor, " draft_vocab"] | None  # the target's token for each of the head's; None: the same tokens

# Trees of tokens, one per row
PerNode = Bool[Tensor, "trees length"]
Columns = Int64[Tensor, "trees length"]  # a column for each node
TreeRows = Float[Tensor, "trees length width"]
Anchors = Int64[Tensor, "trees anchors"]  # columns of nodes under which extra rows hang
AnchorRows = Float[Tensor, "trees anchors depth width"]

# On the host
Nodes = Int64[np.ndarray, " nodes"]  # numbers of nodes in a session's trie, or a number for each node
AnyNodes = Int64[np.ndarray, " _"]  # the same, for lists of arrays of different lengths
Flags = Bool[np.ndarray, " nodes"]
