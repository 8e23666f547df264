"""`mooncake-connector top`: what is asked (`sources`), what becomes of it (`figures`), and how it looks (`screen`)."""
