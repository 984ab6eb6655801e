"""Records the graphs that TensorFlow rewrites and executes, in any thread.

A part of `rewrite_report`, which tells what they mean.
"""

import contextlib
import pathlib
import shutil
import tempfile
import threading

from tfamp.graph_rewrite import graphs as rewrite_graphs
from tfamp.graph_rewrite import switch as graph_rewrite

Graphs = list[rewrite_graphs.RewrittenGraph]


class Recorder:
    """Dumps and collects for all open observations together.

    Both go by switches of the whole process, which the first one sets and the last
    one takes back.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._open = 0
        self._switches = contextlib.ExitStack()
        self._collector = rewrite_graphs.Collector()
        self._folder = pathlib.Path()

    def open(self) -> tuple[set[str], int]:
        """Returns what is there already: names of files, and a number of graphs."""
        with self._lock:
            if not self._open:
                self._start()
            self._open += 1
            self._collector.flush()
            return {path.name for path in self._files()}, len(self._collector.graphs)

    def close(self, found: tuple[set[str], int]) -> tuple[Graphs, Graphs]:
        """Returns the graphs that were dumped, and those collected, since `open`."""
        names, number = found
        with self._lock:
            try:
                self._collector.flush()
                files = [path for path in self._files() if path.name not in names]
                dumped = rewrite_graphs.dumped_graphs(files)
                return dumped, self._collector.graphs[number:]
            finally:
                self._open -= 1
                if not self._open:
                    self._switches.close()

    def _files(self):
        return sorted(self._folder.iterdir())

    def _start(self):
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="tfamp_graphs_")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._folder = pathlib.Path(folder)
            stack.callback(self._hand_over, graph_rewrite.log_folder())
            stack.enter_context(graph_rewrite.dumping_to(folder))
            self._collector = rewrite_graphs.Collector()
            self._collector.start()
            stack.callback(self._collector.stop)
            self._switches = stack.pop_all()

    def _hand_over(self, folder_before):
        """Copies the dumps to the folder that the user gave for them."""
        folder = graph_rewrite.log_folder() or folder_before
        if folder and pathlib.Path(folder).is_dir():
            for path in self._files():
                shutil.copy(path, folder)


RECORDER = Recorder()
