"""What others call fields of a plan and their values: Megatron-LM, DeepSpeed, torchtitan, Hugging Face, papers."""

from __future__ import annotations

from collections.abc import Mapping

PRECISIONS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
    "tensorfloat32": "tf32",
}
FIELDS: Mapping[str, str] = {  # folded names (`topologies.reading.folded`) -> field
    **dict.fromkeys(("tensorparallel", "tensormodelparallelsize", "tensorparallelsize", "tpsize", "tpdegree"), "tp"),
    **dict.fromkeys(("pipelineparallel", "pipelinemodelparallelsize", "pipelineparallelsize", "ppsize", "stages"), "pp"),
    **dict.fromkeys(("contextparallel", "contextparallelsize", "cpsize"), "cp"),
    **dict.fromkeys(("expertparallel", "expertmodelparallelsize", "expertparallelsize", "epsize"), "ep"),
    **dict.fromkeys(("dataparallelsize", "dpsize", "dpdegree", "replicas"), "dp"),
    **dict.fromkeys(("zero", "zerostage", "fsdp", "shardingstrategy", "strategy", "dataparallelism"), "data_parallel"),
    **dict.fromkeys(("microbatchsize", "mbs", "trainmicrobatchsizepergpu", "perdevicetrainbatchsize"), "microbatch"),
    **dict.fromkeys(("globalbatchsize", "gbs", "trainbatchsize", "batchsize", "batch", "minibatch"), "global_batch"),
    **dict.fromkeys(("gradientaccumulationsteps", "gradientaccumulation", "nummicrobatches", "microbatches"), "accumulation"),
    **dict.fromkeys(("seqlength", "seqlen", "sequencelength", "contextlength", "maxseqlen", "blocksize"), "sequence"),
    **dict.fromkeys(("activationcheckpointing", "gradientcheckpointing", "recomputation", "recomputegranularity"), "recompute"),
    **dict.fromkeys(("dtype", "mixedprecision", "paramsdtype", "torchdtype"), "precision"),
    **dict.fromkeys(("virtualpipelinemodelparallelsize", "virtualpipeline", "virtualstages", "modelchunks", "vpp"), "chunks"),
    **dict.fromkeys(("pipelineschedule", "pipelineparallelschedule"), "schedule"),
    **dict.fromkeys(("bucketcapmb", "bucketsize", "reducebucketsize"), "bucket"),
    **dict.fromkeys(("cpuoffload", "offloadoptimizer", "zerooffload"), "offload"),
    **dict.fromkeys(("flashattention", "attentionimplementation", "attnimplementation"), "attention"),
}
