"""What is on the user's disk: spec, code, ignore rules, git, requirements, gcloud's settings → `Inputs`."""
