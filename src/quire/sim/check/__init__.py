"""The randomised harness behind `quire check`: scenarios, faults and the invariants that must hold."""
