"""Steps that several commands share: plan, launch, follow, rehearse, find a run or a VM."""
