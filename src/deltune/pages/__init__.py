"""Self-contained HTML pages: their templates, their one style sheet and script, and line charts as inline SVG."""
