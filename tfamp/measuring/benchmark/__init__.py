"""The benchmark: cells in turns, each in fresh processes, and what they show.

`cells` says what is measured, `measure` does it, `harness` has it done, `report` tells.
"""
