"""Published tables as rows that can be predicted: docs/reference/ turned into set-ups, one module a source."""
