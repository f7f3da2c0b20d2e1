"""The pages of runs: templates, one style sheet and script, and line charts as inline SVG."""
