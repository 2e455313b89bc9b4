"""What is on the user's disk: code files, ignore rules, git, gcloud's settings, requirements."""
