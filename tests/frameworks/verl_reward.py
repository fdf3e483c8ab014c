"""A reward for verl's PPO trainer, which reads it from this file."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """The share of numbers in the response that are larger than the first of the prompt."""
    numbers = [int(word) for word in solution_str.split()]
    return sum(number > int(ground_truth) for number in numbers) / max(1, len(numbers))
