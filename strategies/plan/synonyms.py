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
SCHEDULES: Mapping[str, str] = {  # folded: PyTorch's classes, Megatron-LM's words
    **dict.fromkeys(("schedule1f1b", "onefoneb", "pipedreamflush", "1f1bnoninterleaved"), "1f1b"),
    **dict.fromkeys(("interleaved1f1b", "scheduleinterleaved1f1b", "virtualpipeline", "vpp"), "interleaved"),
    "schedulegpipe": "gpipe",
    **dict.fromkeys(("scheduleloopedbfs", "loopedbreadthfirst"), "looped-bfs"),
    **dict.fromkeys(("scheduleinterleavedzerobubble", "interleavedzerobubble"), "interleaved-zb"),
    **dict.fromkeys(("schedulezbvzerobubble", "zbvzerobubble"), "zb-v"),
    "scheduledualpipev": "dualpipe-v",
}
HOOKS: Mapping[str, str] = {  # folded
    **dict.fromkeys(("fsdp", "fsdp1", "fsdp2", "fullyshard", "fullysharddataparallel", "fullyshardeddataparallel"), "zero3"),
    **dict.fromkeys(("zerostage3", "stage3", "fullshard"), "zero3"),
    **dict.fromkeys(("zerostage2", "stage2", "shardgradop"), "zero2"),
    **dict.fromkeys(("zerostage1", "stage1", "distributedoptimizer"), "zero1"),
    **dict.fromkeys(("distributeddataparallel", "zero0", "stage0", "noshard", "horovod"), "ddp"),
}
UNLIKE: Mapping[str, str] = {  # folded values that are said in another way: how
    **dict.fromkeys(
        ("hsdp", "hybridshard"), "is zero3 with shard, the dp ranks that share a copy: {data_parallel: zero3, shard: 8}"
    ),
    "deepspeed": "is a stage of ZeRO with DeepSpeed's options: {data_parallel: zero3, deepspeed: {}}",
    "zero": "has stages: zero1, zero2 or zero3",
    "zerooffload": "is a stage of ZeRO with offload: {data_parallel: zero2, offload: {optimizer: cpu}}",
    "zeroinfinity": "is zero3 with offload: {data_parallel: zero3, offload: {optimizer: nvme, parameters: nvme}}",
    "zero++": "is zero3 with DeepSpeed's options: `shardyard explain ZeRO++`",
    "megatron": "is no way to share data: zero1 is Megatron-LM's distributed optimizer, tp and pp cut the model",
}
NO_PRECISION: Mapping[str, str] = {
    **dict.fromkeys(("fp8", "float8", "mxfp8", "nvfp4", "fp4"), "is of linear layers only: precision bf16 and plan.fp8={}"),
    **dict.fromkeys(("amp", "mixed", "mixedprecision", "autocast"), "is bf16 or fp16, which keep fp32 masters"),
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
    **dict.fromkeys(("sp", "sequenceparallelism"), "sequence_parallel"),
    **dict.fromkeys(("optim", "optimizertype"), "optimizer"),
    **dict.fromkeys(("gradclip", "clipgrad", "maxgradnorm", "gradientclipping"), "clip_gradients"),
    **dict.fromkeys(("cpuoffload", "offloadoptimizer", "zerooffload"), "offload"),
    **dict.fromkeys(("flashattention", "attentionimplementation", "attnimplementation"), "attention"),
}
