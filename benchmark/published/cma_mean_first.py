"""An ablation of ppo_cma.py, with its flags: the mean moves before the variance, where ppo_cma.py
lets the variance see the old mean and the mean the new variance."""

from cma import main, ppo_cma

fit, waiting = ppo_cma.fit, []


def mean_first(name: str, *given) -> dict[str, float]:
    """As ppo_cma.fit, but the variance waits for the policy."""
    if name == "variance":
        waiting.append((name, *given))
        return {}
    metrics = fit(name, *given)
    if name == "policy":
        metrics |= fit(*waiting.pop())
    return metrics


ppo_cma.fit = mean_first

if __name__ == "__main__":
    main()
