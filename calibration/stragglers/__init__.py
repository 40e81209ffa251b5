"""What stragglers cost a training job: op-level traces replayed with other durations.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv:2505.05713), and the rules of its artifact,
github.com/ByteDance-Seed/StragglerAnalysis.
"""
