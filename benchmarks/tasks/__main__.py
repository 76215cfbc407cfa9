"""Run the study of whole tasks as the command line asks."""

from benchmarks.tasks.study import STUDY

if __name__ == "__main__":
    STUDY.run()
