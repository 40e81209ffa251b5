"""`shardyard explore`: a local page of a job, its answer beside it. Values come from a browser and are not trusted."""
