"""Many runs: works named by their content, given to workers, kept in one file."""
