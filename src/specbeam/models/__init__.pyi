"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.engines.choices import OWN_ROUNDINGS as OWN_ROUNDINGS
from specbeam.models.checkpoints.boundary import reading as reading
from specbeam.models.checkpoints.hub import hub_lookups as hub_lookups
from specbeam.models.checkpoints.numbers import check_weights as check_weights
from specbeam.models.checkpoints.pretrained import open_checkpoint as open_checkpoint
from specbeam.models.checkpoints.pretrained import pretrained as pretrained
from specbeam.models.early_layers import last_norm as last_norm
from specbeam.models.encoder_decoder import EncoderDecoderLM as EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM as HuggingFaceLM
from specbeam.models.huggingface import vocab_of as vocab_of
from specbeam.models.loading.models import load_model as load_model
from specbeam.models.loading.models import name_or_path as name_or_path
from specbeam.models.loading.tokenizers import read_tokenizer as read_tokenizer
from specbeam.models.pair import as_pair as as_pair
from specbeam.models.skipping import SkippingLM as SkippingLM
from specbeam.models.skipping import skipping_model as skipping_model
from specbeam.models.sublayers import Sublayers as Sublayers
from specbeam.models.sublayers import chosen as chosen
