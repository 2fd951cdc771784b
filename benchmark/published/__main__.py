"""`python -m benchmark.published` makes all figures in results/ anew from the committed runs, the
tables of README.md and docs/, and results/INDEX.csv, which has the files behind each number."""

from benchmark.published import curves, docs, index

if __name__ == "__main__":
    curves.figures()
    docs.docs()
    index.write()
