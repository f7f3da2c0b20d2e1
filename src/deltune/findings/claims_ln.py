"""What "Parameter-Efficient Tuning on Layer Normalization" (Qi et al. 2022) claims, study by study.

Margins are ours and said to be so: the paper prints none.
"""

from __future__ import annotations

from .cells import EVERY, LARGEST, SMALLEST
from .claims import Beats, Best, Both, Claim, Fewer, Within
from .readings import RANK, score

LN, BITFIT, MAM, UNION = ({"method": name} for name in ("layernorm", "bitfit", "mam", "prefix_layernorm"))
THREE, PREFIX, ADAPTER, LORA, FULL = (
    {"method": name} for name in ("three_vectors", "prefix", "adapter", "lora", "full")
)

NO_THREE = {"task": ("commonsense_qa", "social_iqa")}
"""Table 1's note: 3V cannot be applied to these."""

CHANGE = score("change", "mean absolute change")
TRAIN, INFERENCE = (score(name, "% of full tuning's time", lower=True) for name in ("train", "inference"))


def _added(with_norms: str, without: str) -> Beats:
    return Beats({"method": with_norms}, {"method": without})


LN_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "ln/nlu": (
        Claim(
            "LN-tuning beats BitFit with half the parameters",
            "abstract, §3.2, table 1",
            Both((Beats(LN, BITFIT), Fewer(LN, BITFIT, ratio=0.5))),
        ),
        Claim("LN-tuning beats 3V", "§3.2, table 1", Beats(LN, THREE), off=NO_THREE),
        Claim("LN-tuning is inferior to methods with over 0.3 % of the parameters: adapter, prefix, LoRA, MAM",
              "§3.2, table 1", Both(tuple(Beats(other, LN) for other in (ADAPTER, PREFIX, LORA, MAM)))),
        Claim("prefix + LN beats MAM with fewer parameters", "§1, table 1",
              Both((Beats(UNION, MAM), Fewer(UNION, MAM)))),
        Claim("prefix + LN is the best of the parameter-efficient methods", "abstract, table 1",
              Best(UNION, "method", but=("full", "head", "three_vectors"))),
        Claim("adapter and prefix are comparable at equal parameters: within 1 point (margin ours)", "§3.2, table 1",
              Within(ADAPTER, PREFIX, 1.0, both=True)),
    ),
    "ln/nlg": (
        Claim("LN-tuning ranks better than BitFit", "§3.2, table 2", Beats(LN, BITFIT, reading=RANK)),
        Claim("prefix-tuning ranks better than MAM", "§3.2, table 2", Beats(PREFIX, MAM, reading=RANK)),
        Claim("prefix + LN ranks better than MAM with fewer parameters", "§1, table 2",
              Both((Beats(UNION, MAM, reading=RANK), Fewer(UNION, MAM)))),
        Claim("prefix + LN ranks best of the parameter-efficient methods", "abstract, table 2",
              Best(UNION, "method", but=("full",), reading=RANK)),
        Claim("full tuning ranks best of all", "table 2", Best(FULL, "method", reading=RANK)),
    ),
    "ln/time": (
        Claim("LN-tuning takes the least time in training", "§3.3, figure 2", Best(LN, "method", reading=TRAIN)),
        Claim("LN-tuning, BitFit and full tuning take similar time in inference: within 5 % (margin ours)",
              "§3.3, figure 4", Both(tuple(Within(LN, other, 5.0, both=True, reading=INFERENCE)
                                           for other in (BITFIT, FULL)))),
        Claim("LN-tuning is faster in inference than the methods that insert something", "§3.3, figure 4",
              Both(tuple(Beats(LN, other, reading=INFERENCE) for other in (ADAPTER, PREFIX, MAM)))),
        Claim("MAM takes the longest of the parameter-efficient methods in training", "appendix B, figure 2",
              Both(tuple(Beats(other, MAM, reading=TRAIN) for other in (LN, BITFIT, ADAPTER, PREFIX, LORA)))),
        Claim("every parameter-efficient method trains in less than 90 % of full tuning's time", "appendix B, figure 2",
              Both(tuple(Beats(method, FULL, margin=10.0, reading=TRAIN)
                         for method in (LN, BITFIT, ADAPTER, PREFIX, LORA, MAM)))),
        Claim("adapter-tuning trains faster than prefix-tuning", "appendix B, figure 2",
              Beats(ADAPTER, PREFIX, reading=TRAIN)),
    ),
    "ln/terms": (
        Claim("terms change more close to the output than close to the input", "§4, figure 3",
              Beats({"layers": "near output", "term": EVERY, "module": EVERY},
                    {"layers": "near input", "term": EVERY, "module": EVERY}, reading=CHANGE)),
        Claim("close to the output the gain changes more than the bias", "§4, figure 3",
              Beats({"layers": "near output", "term": "gain", "module": EVERY},
                    {"layers": "near output", "term": "bias", "module": EVERY}, reading=CHANGE)),
        Claim("terms change more where there are more data: SST-2 > SICK > CB", "§4, figure 3", Both((
            Beats({"task": "sst2"}, {"task": "sick"}, reading=CHANGE),
            Beats({"task": "sick"}, {"task": "cb"}, reading=CHANGE),
        ))),
        Claim("terms change more for answers and entities than for two classes", "§4, figure 3",
              Beats({"task": ("commonsense_qa", "broad_twitter")}, {"task": ("sst2", "sick", "cb")}, reading=CHANGE)),
    ),
    "ln/ablation": (
        Claim("every ablated method loses: LN-tuning has nothing superfluous", "§5, table 5",
              Best({"method": "all"}, "method", but=("gain+bias",))),
        Claim("bias alone beats gain alone", "§5, table 5", Beats({"method": "bias"}, {"method": "gain"})),
        Claim("the norm of attention alone beats that of the FFN alone (table 5 itself says the reverse)", "§5",
              Beats({"method": "attention norm"}, {"method": "ffn norm"})),
        Claim("leaving out layers costs more than leaving out modules", "§5, table 5",
              Beats({"method": ("attention norm", "ffn norm")}, {"method": ("lower half", "upper half")})),
        Claim("in the smaller model the lower half beats the upper half", "§5, table 5",
              Beats({"method": "lower half", "model": SMALLEST}, {"method": "upper half", "model": SMALLEST})),
        Claim("in the larger model the upper half beats the lower half", "§5, table 5",
              Beats({"method": "upper half", "model": LARGEST}, {"method": "lower half", "model": LARGEST})),
    ),
    "ln/unified": (
        Claim("layernorm added to a method at attention gains", "abstract of v3 (2)", Both((
            _added("prefix+layernorm", "prefix"), _added("adapter_attention+layernorm", "adapter_attention"),
        ))),
        Claim("layernorm added to a method at the FFN loses", "abstract of v3 (2)",
              _added("adapter_ffn", "adapter_ffn+layernorm")),
        Claim("layernorm added to MAM, at attention and the FFN, loses", "abstract of v3 (2)",
              _added("mam", "mam+layernorm")),
        Claim("prefix + adapter at attention + layernorm is the best", "abstract of v3 (1)",
              Best({"method": "prefix+adapter_attention+layernorm"}, "method", but=("full",))),
    ),
}  # fmt: skip
