"""The public names of deltune. `__init__.py` reads this list, and type checkers read it in place of that file."""

import contextlib

from .anatomy.inspection import inspect as inspect
from .errors import DeltuneError as DeltuneError
from .methods.budget import fit as fit
from .methods.compositions import Add as Add
from .methods.compositions import Composition as Composition
from .methods.compositions import Gate as Gate
from .methods.compositions import PrefixGate as PrefixGate
from .methods.compositions import Scale as Scale
from .methods.compositions import SigmoidGate as SigmoidGate
from .methods.counting import Count as Count
from .methods.counting import count as count
from .methods.forms.attention import MultiHead as MultiHead
from .methods.forms.attention import OwnMultiHead as OwnMultiHead
from .methods.forms.attention import Prefix as Prefix
from .methods.forms.base import (
    Bottleneck as Bottleneck,
)
from .methods.forms.base import (
    FactorForm as FactorForm,
)
from .methods.forms.base import (
    Form as Form,
)
from .methods.forms.base import (
    LowRank as LowRank,
)
from .methods.forms.base import (
    MatrixForm as MatrixForm,
)
from .methods.forms.base import (
    Mixture as Mixture,
)
from .methods.forms.base import (
    Place as Place,
)
from .methods.forms.base import (
    Prompt as Prompt,
)
from .methods.forms.base import (
    Rescale as Rescale,
)
from .methods.forms.base import (
    TensorSpec as TensorSpec,
)
from .methods.forms.base import (
    Vector as Vector,
)
from .methods.forms.base import (
    WeightForm as WeightForm,
)
from .methods.forms.base import (
    Widths as Widths,
)
from .methods.library import (
    adapter as adapter,
)
from .methods.library import (
    apet as apet,
)
from .methods.library import (
    beft as beft,
)
from .methods.library import (
    bitfit as bitfit,
)
from .methods.library import (
    boft as boft,
)
from .methods.library import (
    c3a as c3a,
)
from .methods.library import (
    compacter as compacter,
)
from .methods.library import (
    deft as deft,
)
from .methods.library import (
    delora as delora,
)
from .methods.library import (
    diff_pruning as diff_pruning,
)
from .methods.library import (
    dora as dora,
)
from .methods.library import (
    fourierft as fourierft,
)
from .methods.library import (
    full as full,
)
from .methods.library import (
    glora as glora,
)
from .methods.library import (
    gralora as gralora,
)
from .methods.library import (
    head as head,
)
from .methods.library import (
    hira as hira,
)
from .methods.library import (
    hra as hra,
)
from .methods.library import (
    ia3 as ia3,
)
from .methods.library import (
    layernorm as layernorm,
)
from .methods.library import (
    loha as loha,
)
from .methods.library import (
    lokr as lokr,
)
from .methods.library import (
    lora as lora,
)
from .methods.library import (
    lora_fa as lora_fa,
)
from .methods.library import (
    lora_xs as lora_xs,
)
from .methods.library import (
    loreft as loreft,
)
from .methods.library import (
    mam as mam,
)
from .methods.library import (
    mica as mica,
)
from .methods.library import (
    miss as miss,
)
from .methods.library import (
    multi_head_parallel_adapter as multi_head_parallel_adapter,
)
from .methods.library import (
    nola as nola,
)
from .methods.library import (
    oft as oft,
)
from .methods.library import (
    olora as olora,
)
from .methods.library import (
    osf as osf,
)
from .methods.library import (
    p_tuning_v2 as p_tuning_v2,
)
from .methods.library import (
    parallel_adapter as parallel_adapter,
)
from .methods.library import (
    peanut as peanut,
)
from .methods.library import (
    pissa as pissa,
)
from .methods.library import (
    prefix as prefix,
)
from .methods.library import (
    prefix_layernorm as prefix_layernorm,
)
from .methods.library import (
    prompt as prompt,
)
from .methods.library import (
    psoft as psoft,
)
from .methods.library import (
    randlora as randlora,
)
from .methods.library import (
    road as road,
)
from .methods.library import (
    scaled_parallel_adapter as scaled_parallel_adapter,
)
from .methods.library import (
    shira as shira,
)
from .methods.library import (
    ssf as ssf,
)
from .methods.library import (
    three_vectors as three_vectors,
)
from .methods.library import (
    tinylora as tinylora,
)
from .methods.library import (
    trainable_tokens as trainable_tokens,
)
from .methods.library import (
    unilora as unilora,
)
from .methods.library import (
    unipelt as unipelt,
)
from .methods.library import (
    vblora as vblora,
)
from .methods.library import (
    vera as vera,
)
from .methods.registry import methods as methods
from .methods.registry import parse as parse
from .methods.registry import register as register
from .methods.spec import Modification as Modification
from .methods.spec import Selection as Selection
from .methods.spec import named_method as named_method
from .runtime.attach import attach as attach
from .runtime.attach import export as export
from .runtime.attach import load as load
from .runtime.attach import tuned as tuned
from .runtime.handle import Tuned as Tuned
from .runtime.linear import optimize_linear as optimize_linear
from .runtime.trainer_callback import SaveDeltaCallback as SaveDeltaCallback

__version__: str

def quiet_imports() -> contextlib.AbstractContextManager[None]: ...
