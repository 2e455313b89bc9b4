"""From a YAML file to a `JobSpec`: strict, with all problems of a file at once. Pure but for reading the file."""
