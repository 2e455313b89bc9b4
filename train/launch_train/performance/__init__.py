"""What makes a model train fast, and fit: each technique behind a name, chosen by the machine or by the spec."""
