"""Read the user's files: code, ignore rules, git, gcloud's settings, requirements."""
