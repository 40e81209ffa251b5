"""The links of a cluster and the routes over them: as described, impaired by effects, or of a part that a job has."""
