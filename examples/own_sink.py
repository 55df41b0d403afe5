"""A sink of your own: `monitor.sinks = ["own_sink.py:PrintLoss"]` writes the loss of each step into a file."""


class PrintLoss:
    name = "print-loss"

    def open(self, context):
        self.file = (context.run_dir / "loss.txt").open("a")

    def write(self, bundle):
        for point in bundle.metrics:
            if "train/loss" in point.values:
                self.file.write(f"{point.step} {point.values['train/loss']}\n")

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()
