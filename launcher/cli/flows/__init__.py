"""Steps that several commands share: plan, launch, follow, run here, find a run or a VM."""
