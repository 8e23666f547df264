"""What is counted and measured, under which names (`registry`), and the page that says so (`docs`)."""
