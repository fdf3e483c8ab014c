"""What of Megatron does not go with which feature of ours: rows by the subject of Megatron's flags, in one table."""

from .conditions import packs_documents
from .precision import BLOCKS
from .row import OurFeature, setting_of
from .table import UNSUPPORTED, first_unsupported, unsupported
