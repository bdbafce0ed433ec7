"""How fast runmirror is beside its peers: ``python -m tests.benchmarks`` prints one table.

Every number of a line is measured in the same run, in rounds that alternate between runmirror and the peer; medians over
the rounds, and the median of each round's ratio. The ratios are what counts: times differ from machine to machine.
"""
