"""Which configuration for a model, a cluster and a batch. Start with space.Question and search.Search."""
