"""The public names of deltune. `__init__.py` reads this list, and type checkers read it in place of that file."""

from .anatomy.inspection import inspect as inspect
from .errors import DeltuneError as DeltuneError
from .methods.attention_forms import MultiHead as MultiHead, OwnMultiHead as OwnMultiHead, Prefix as Prefix
from .methods.budget import fit as fit
from .methods.compositions import Add as Add, Gate as Gate, Scale as Scale, SigmoidGate as SigmoidGate
from .methods.counting import Count as Count, count as count
from .methods.forms import (
    Bottleneck as Bottleneck,
    LowRank as LowRank,
    Mixture as Mixture,
    Prompt as Prompt,
    Rescale as Rescale,
    Vector as Vector,
)
from .methods.library import (
    adapter as adapter,
    apet as apet,
    bitfit as bitfit,
    diff_pruning as diff_pruning,
    full as full,
    head as head,
    ia3 as ia3,
    layernorm as layernorm,
    lora as lora,
    mam as mam,
    multi_head_parallel_adapter as multi_head_parallel_adapter,
    p_tuning_v2 as p_tuning_v2,
    parallel_adapter as parallel_adapter,
    prefix as prefix,
    prefix_layernorm as prefix_layernorm,
    prompt as prompt,
    scaled_parallel_adapter as scaled_parallel_adapter,
    three_vectors as three_vectors,
    unipelt as unipelt,
)
from .methods.registry import methods as methods, parse as parse
from .methods.spec import Modification as Modification, Selection as Selection
from .runtime.attaching import attach as attach, export as export, load as load, tuned as tuned
from .runtime.attention import prefix_attention as prefix_attention, prefix_report as prefix_report
from .runtime.handle import Tuned as Tuned

__version__: str
