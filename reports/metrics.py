"""The glossary: every metric once, with its definition, formula, unit and source.

A key is the path of the metric in `Summary.to_dict()`, with * for any name or number. To add a metric, add an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from topologies.reading import UserError, nearest

MEGATRON = "Narayanan et al. 2021, arXiv:2104.04473"
PALM = "Chowdhery et al. 2022, arXiv:2204.02311, appendix B"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198"
ZERO = "Rajbhandari et al. 2020, arXiv:1910.02054"
NCCL = "nccl-tests, doc/PERFORMANCE.md"
TIMELINE = "counted on the simulated timeline"
PROFILE = "the profile, with its provenance"


@dataclass(frozen=True)
class Metric:
    """An entry of the glossary. key: path in `Summary.to_dict()`, or "" when it is not there; names: others that people use."""

    name: str
    key: str
    definition: str
    formula: str
    unit: str
    source: str
    names: tuple[str, ...] = ()


_TIME = "mean over all ranks of what the compute stream does, second by second"

METRICS = (
    Metric("step time", "step_seconds", "Time of one optimizer step, from its start to the end of the last op of any rank.",
           "max over ranks of the end of their last op", "s", TIMELINE, ("T", "step")),
    Metric("interval", "interval", "Error bar of the step time, from how well the prices predict kernels and collectives.",
           "step · exp(±1.28 σ), σ² = Σ (∂ ln step / ∂ ln price · σ of the price)²", "s", PROFILE, ("error bar", "uncertainty")),
    Metric("interval low", "interval.low", "Lower end of the error bar.", "step · exp(−1.28 σ)", "s", PROFILE),
    Metric("interval high", "interval.high", "Upper end of the error bar.", "step · exp(+1.28 σ)", "s", PROFILE),
    Metric("interval level", "interval.level", "Share of outcomes that lie in the interval if the spreads are right.", "0.8",
           "fraction", PROFILE),
    Metric("interval parts", "interval.parts", "What each group of prices adds to the interval: σ of the step's logarithm.",
           "∂ ln step / ∂ ln price · σ of the price", "1", PROFILE),
    Metric("tokens/s", "tokens_per_second", "Tokens that the whole job trains on per second.",
           "global batch · sequence / step time", "tokens/s", MEGATRON, ("throughput",)),
    Metric("tokens/s/GPU", "tokens_per_second_per_gpu", "Tokens per second, per GPU; what to compare jobs of different size by.",
           "tokens/s / GPUs", "tokens/s", MEGATRON),
    Metric("model FLOP/s", "model_flops_per_gpu", "Model FLOPs that one GPU achieves per second, recomputation not counted.",
           "model FLOPs of the step / (GPUs · step time)", "FLOP/s", f"{MEGATRON}, section 5.1", ("TFLOP/s", "achieved FLOP/s")),
    Metric("MFU", "mfu",
           "Model FLOPs utilisation: the share of the GPUs' specified peak that the model's own FLOPs take. Attention counts in "
           "full, not halved by its causal mask; above 20 % of the FLOPs, a note tells MFU without what is masked.",
           "model FLOPs of the step / (GPUs · peak of peak_dtype · step time)", "fraction", PALM, ("model FLOPs utilization",)),
    Metric("HFU", "hfu",
           "Hardware FLOPs utilisation: as MFU, with what is recomputed counted too; equal to MFU without recomputation.",
           "(model FLOPs + recomputed FLOPs) / (GPUs · peak of peak_dtype · step time)", "fraction", PALM,
           ("hardware FLOPs utilization",)),
    Metric("FLOPs rule", "flops_rule", "How FLOPs are counted for MFU and HFU; figures by different rules do not compare.",
           "2 FLOPs per multiply-add of matrix products, backward = 2 × forward", "text", f"{MEGATRON}, appendix"),
    Metric("peak dtype", "peak_dtype",
           "Whose specified dense peak MFU and HFU are of: that of the tensors, also where products are in fp8.",
           "plan.precision", "text", "as torchtitan counts (github.com/pytorch/torchtitan, issue 560)"),
    Metric("GPUs", "gpus", "Number of GPUs of the job, which is the world size W.", "tp · cp · ep · dp · pp", "1", MEGATRON,
           ("world size", "W")),
    Metric("GPU-hours", "gpu_hours_per_step",
           "Time of all GPUs together for one step; for N tokens, multiply by N / tokens per step.", "GPUs · step time / 3600",
           "h", "definition", ("GPU-hours per step", "cost")),
    Metric("breakdown", "breakdown", "Where the step time goes; the components add up to the step time exactly.", _TIME, "s",
           TIMELINE, ("step breakdown",)),
    Metric("forward", "breakdown.forward", "Time of the kernels of the forward pass.", _TIME, "s", TIMELINE),
    Metric("backward", "breakdown.backward", "Time of the kernels of the backward pass, without recomputation.", _TIME, "s",
           TIMELINE),
    Metric("recompute", "breakdown.recompute",
           "Time of forward kernels that run again in the backward pass to restore activations.", _TIME, "s", KORTHIKANTI,
           ("recomputation", "activation checkpointing")),
    Metric("optimizer", "breakdown.optimizer", "Time of the optimizer's update of the parameters.", _TIME, "s", TIMELINE),
    Metric("tp exposed", "breakdown.tp exposed", "Tensor parallel communication that the compute stream waits for.", _TIME, "s",
           TIMELINE),
    Metric("cp exposed", "breakdown.cp exposed", "Context parallel communication that the compute stream waits for.", _TIME, "s",
           TIMELINE),
    Metric("ep exposed", "breakdown.ep exposed", "Expert parallel communication that the compute stream waits for.", _TIME, "s",
           TIMELINE),
    Metric("dp exposed", "breakdown.dp exposed", "Data parallel communication that the compute stream waits for.", _TIME, "s",
           TIMELINE),
    Metric("replica exposed", "breakdown.replica exposed",
           "Communication between replicas of a sharded copy (HSDP) that the compute stream waits for.", _TIME, "s", TIMELINE),
    Metric("pp exposed", "breakdown.pp exposed", "Pipeline sends that the compute stream waits for while they are on the way.",
           _TIME, "s", TIMELINE),
    Metric("host exposed", "breakdown.host exposed",
           "Copies between the GPU and its node's memory that the compute stream waits for.", _TIME, "s", TIMELINE, ("offload",)),
    Metric("nvme exposed", "breakdown.nvme exposed", "Reads and writes of NVMe disks that the compute stream waits for.", _TIME,
           "s", TIMELINE),
    Metric("cpu exposed", "breakdown.cpu exposed",
           "Time the compute stream waits for the CPUs to update offloaded optimizer states; no communication.", _TIME, "s",
           TIMELINE),
    Metric("launch", "breakdown.launch", "Time the GPU waits for the host to launch its next kernel.",
           "time of a block − its kernels − slowdown, and idle time before a collective that the host has not launched", "s",
           TIMELINE, ("launch overhead", "launch-bound")),
    Metric("slowdown", "breakdown.slowdown", "Time by which kernels are slower because a collective runs on the same GPU.",
           "(slowdown factor of the profile − 1) · overlapped compute", "s", PROFILE, ("interference",)),
    Metric("bubble time", "breakdown.bubble",
           "Time a rank's compute stream waits for a pipeline dependency with nothing on the way to it.", _TIME, "s",
           f"{MEGATRON}, section 2.2"),
    Metric("wait", "breakdown.wait", "Time a rank waits for other ranks to come to a collective, or to end the step.", _TIME, "s",
           TIMELINE, ("skew", "waiting")),
    Metric("bubble", "bubble", "Share of the step that ranks wait for a pipeline dependency.",
           "bubble time / step time; with equal stages and no communication (p − 1)/(m + p − 1) for p stages and m microbatches",
           "fraction", f"{MEGATRON}, section 2.2; Huang et al. 2019, arXiv:1811.06965", ("pipeline bubble",)),
    Metric("uneven stages", "uneven",
           "Share of the step that ranks wait because stages have unequal work; a part of the bubble.",
           "(busiest stage − mean of the stages) / step time, at most the bubble", "fraction", TIMELINE, ("uneven",)),
    Metric("exposed communication", "exposed",
           "Share of the step in which communication goes on while the compute stream is idle.",
           "sum of the exposed components / step time", "fraction", TIMELINE, ("exposed comm", "exposed")),
    Metric("volume", "volume", "What one rank sends along an axis in one step, of the rank that sends most.",
           "sum over its collectives and sends; along dp: DDP and ZeRO-1/2 2Ψ, ZeRO-3 3Ψ, times (n − 1)/n", "by axis",
           ZERO, ("communication volume",)),
    Metric("volume in bytes", "volume.*.bytes", "Bytes that one rank sends along the axis in one step.",
           "ring all-reduce of S bytes over n ranks: 2(n − 1)/n · S", "B", NCCL),
    Metric("volume in elements", "volume.*.elements", "Elements that one rank sends along the axis in one step.",
           "bytes / bytes per element", "1", ZERO),
    Metric("volume in Ψ", "volume.*.psi",
           "Elements that one rank sends, in units of the whole model's parameters: along dp about 2 for DDP, 3 for ZeRO-3 per "
           "microbatch, over tp·pp because a rank holds that part of the model only.", "elements / Ψ", "Ψ",
           f"{ZERO}, section 7", ("psi volume",)),
    Metric("links", "links", "The hottest link of each kind.", "the link with the highest utilisation", "by kind", TIMELINE,
           ("hot link", "hottest link")),
    Metric("link name", "links.*.name", "One of the links that carry the same.", "the lowest-numbered of them", "name", TIMELINE),
    Metric("link kind", "links.*.kind", "What sort of link it is, which prices it.", "of the cluster's wiring", "name", TIMELINE),
    Metric("link count", "links.*.count", "How many links carry the same as this one.", "links that no traffic tells apart", "1",
           TIMELINE),
    Metric("link capacity", "links.*.capacity", "Nominal bandwidth of the link in one direction.", "of the cluster", "B/s",
           TIMELINE),
    Metric("link bytes", "links.*.bytes", "Bytes that the link carries in one step.", "sum over transfers that cross it", "B",
           TIMELINE),
    Metric("link utilisation", "links.*.utilisation", "Share of the link's nominal capacity that is used over the step.",
           "link bytes / (link capacity · step time)", "fraction", TIMELINE, ("utilisation",)),
    Metric("Ψ", "", "Number of parameters of the model, in elements and not in bytes.", "sum of the sizes of all weights", "1",
           ZERO, ("psi", "parameters")),
    Metric("memory", "memory", "Peak memory of each stage, by kind, and when it is reached.",
           "the allocations and releases of all ops, played with the timeline", "by stage", TIMELINE, ("memory breakdown",)),
    Metric("stage", "memory.*.stage", "Number of the pipeline stage.", "0 … pp − 1", "1", MEGATRON),
    Metric("rank", "memory.*.rank", "The rank whose memory it is; the other ranks of the stage hold the same.", "0 … W − 1", "1",
           MEGATRON),
    Metric("memory kinds", "memory.*.kinds", "What a rank holds at its peak, by kind.", "bytes by kind", "B", TIMELINE),
    Metric("parameter memory", "memory.*.kinds.parameter", "The weights a rank holds for the whole step.",
           "parameters on the rank · bytes per weight; divided by dp under ZeRO-3", "B", f"{ZERO}, section 3.1", ("parameter",)),
    Metric("gradient memory", "memory.*.kinds.gradient", "The accumulated gradients.",
           "parameters on the rank · bytes per gradient; divided by dp from ZeRO-2 on", "B", f"{ZERO}, section 3.1",
           ("gradient",)),
    Metric("optimizer memory", "memory.*.kinds.optimizer", "Optimizer states, and fp32 master weights with 16-bit training.",
           "parameters on the rank · 12 bytes for mixed-precision Adam; divided by dp from ZeRO-1 on", "B",
           f"{ZERO}, section 3.1", ("optimizer state",)),
    Metric("activation memory", "memory.*.kinds.activation", "What the forward pass keeps for the backward pass.",
           "about s·b·h·34 bytes per layer without recomputation, plus attention scores when materialised", "B", KORTHIKANTI,
           ("activation",)),
    Metric("temporary memory", "memory.*.kinds.temporary",
           "Workspace that lives no longer than one pass: restored activations, gathered weights.",
           "largest workspace of the running pass", "B", TIMELINE, ("temporary",)),
    Metric("buffer memory", "memory.*.kinds.buffer", "Buffers kept for communication.", "by op", "B", TIMELINE, ("buffer",)),
    Metric("overhead memory", "memory.*.overhead", "What a process needs besides its tensors.",
           "context + communicators · buffer of one + allocator's reserve · tensors", "B", PROFILE, ("overhead",)),
    Metric("overhead by part", "memory.*.overheads", "The parts of overhead memory.", "bytes by part", "B", PROFILE),
    Metric("context memory", "memory.*.overheads.context", "The driver's context and loaded kernels.", "a constant", "B",
           PROFILE),
    Metric("communicator memory", "memory.*.overheads.communicators", "Buffers of NCCL's communicators.",
           "(axes of more than one rank, and all ranks) · channels · buffers of a channel", "B", PROFILE, ("communicators",)),
    Metric("reserve", "memory.*.overheads.reserve", "What the allocator holds beyond what tensors take: its fragmentation.",
           "a fraction of the tensors", "B", PROFILE, ("fragmentation",)),
    Metric("cached memory", "memory.*.cached",
           "What the caching allocator keeps besides and gives back before memory runs out: not part of the peak.",
           "reserved at most − peak", "B", PROFILE),
    Metric("stage peak memory", "memory.*.peak", "Most memory that the stage's ranks hold at one time, overhead included.",
           "max over time of the sum of kinds, + overhead", "B", TIMELINE),
    Metric("time of the peak", "memory.*.time", "When in the step the stage first holds most.", "seconds from the start", "s",
           TIMELINE),
    Metric("op of the peak", "memory.*.op", "The op during which the stage first holds most.", "name of the op", "text",
           TIMELINE),
    Metric("peak memory", "memory_peak", "Most memory that any rank holds at one time.", "max over stages of their peak", "B",
           TIMELINE, ("memory peak",)),
    Metric("memory over", "memory_over", "By how much the worst stage does not fit; 0 when it fits.",
           "max(0, peak memory − capacity)", "B", TIMELINE, ("out of memory", "OOM")),
    Metric("worst stage", "memory_worst_stage", "The stage with the highest peak memory.", "argmax over stages of their peak",
           "1", TIMELINE),
    Metric("memory capacity", "memory_capacity", "Memory of one GPU.", "by the catalogue of GPUs", "B",
           "topologies/gpus, with its sources", ("capacity",)),
    Metric("fits", "fits", "Whether every rank's peak memory is within the GPU's memory.", "peak memory ≤ capacity",
           "true or false", TIMELINE),
    Metric("offloaded", "offloaded", "What the GPUs of a node have offloaded to its memory and its disks.",
           "sum over the node's ranks: states, gradients of the shard, buffers", "of the fullest node", TIMELINE),
    Metric("host node", "offloaded.node", "The node that is fullest.", "0 … nodes − 1", "1", TIMELINE),
    Metric("host memory", "offloaded.memory", "Bytes in the memory of its CPUs.", "see offloaded", "B", TIMELINE),
    Metric("host memory capacity", "offloaded.memory_capacity", "Memory of a node's CPUs.", "of the cluster", "B", TIMELINE),
    Metric("NVMe", "offloaded.disk", "Bytes on its disks.", "see offloaded", "B", TIMELINE),
    Metric("NVMe capacity", "offloaded.disk_capacity", "Room on a node's disks.", "of the cluster", "B", TIMELINE),
    Metric("events", "events", "Events that the simulation scheduled; how much work the prediction was.", "count", "1", TIMELINE),
    Metric("profile", "profile", "The measured prices that the prediction rests on.", "name of a profile", "text", PROFILE),
    Metric("notes", "notes", "What a reader must know of this prediction, such as prices outside their measured range.", "-",
           "text", TIMELINE),
    Metric("algbw", "", "Algorithm bandwidth of a collective: its buffer over its time.", "S / t, where S is the full buffer",
           "B/s", NCCL, ("algorithm bandwidth",)),
    Metric("busbw", "", "Bus bandwidth of a collective: what a link would have to carry, comparable with its specified speed.",
           "algbw · 2(n − 1)/n for all-reduce, · (n − 1)/n for all-gather, reduce-scatter and all-to-all, · 1 for broadcast",
           "B/s", NCCL, ("bus bandwidth",)),
)  # fmt: skip


def _index() -> dict[str, Metric]:
    """Metrics by name, key and other names, in lower case; the first to claim a word has it."""
    index: dict[str, Metric] = {}
    for words in ((m.name for m in METRICS), (m.key for m in METRICS)):
        index |= {word.lower(): metric for word, metric in zip(words, METRICS, strict=True) if word and word.lower() not in index}
    for metric in METRICS:
        for word in metric.names:
            index.setdefault(word.lower(), metric)
    return index


def metric_names() -> list[str]:
    """Names of all metrics, in the order of the glossary."""
    return [metric.name for metric in METRICS]


def metric(name: str) -> Metric:
    """The entry of that name, key or other name, in any case. Raises UserError with the nearest name."""
    index = _index()
    found = index.get(name.strip().lower())
    if found is None:
        hint = nearest(name.strip().lower(), index)
        known = f"; known: {', '.join(metric_names())}"
        raise UserError(f"unknown metric '{name}'{hint if 'did you mean' in hint else known}")
    return found


def explain(name: str) -> str:
    """The entry for people, a few lines. Raises UserError with the nearest name."""
    entry = metric(name)
    lines = [entry.name, f"  {entry.definition}", f"  formula   {entry.formula}", f"  unit      {entry.unit}"]
    lines += [f"  source    {entry.source}", *([f"  JSON key  {entry.key}"] if entry.key else [])]
    return "\n".join(lines)
