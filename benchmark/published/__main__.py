"""`python -m benchmark.published` makes all figures in results/ anew from the committed runs, and
the tables and links of README.md and docs/."""

from benchmark.published import curves, docs

if __name__ == "__main__":
    figures = curves.clipped, curves.kl_adaptive, curves.atari, curves.head_to_head, curves.modes
    for make in (*figures, curves.humanoid, curves.memory, curves.what_matters, docs.docs):
        make()
