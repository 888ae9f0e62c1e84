"""A model of a disk that loses power: what is left of a folder if it fails at any moment.

Real disks keep some of the changes that were not synced, and lose others. The model takes the
extremes: names may survive without contents, contents without names, and the names in one folder
without those in another. Only a rename is atomic.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress

CHANGES = ("fsync", "mkdir", "rename", "replace", "rmdir", "truncate", "unlink")


class Disk:
    """Watches a folder, and collects all states in which a power loss could leave it.

    A state is a dictionary from paths, relative to the folder, to contents and modification times;
    None for a folder.

    Args:
        root: The folder. What it contains at the beginning is on the disk.
    """

    def __init__(self, root):
        self.root = root
        self.held = {}  # files that are open, by inode, so that inodes are not used again
        self.names, self.contents = {}, {}  # what was synced, by inode
        self.now = {}  # the names in each folder
        self.renamed = None  # the last rename, which may survive alone
        self.states = {}  # each once
        self._look()
        self.names = {folder: dict(names) for folder, names in self.now.items()}
        self.contents = {inode: self._read(inode) for inode in self.held}

    @contextmanager
    def watched(self, monkeypatch):
        """Collect states before each change, and at the end."""
        with monkeypatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, self._watch(name, getattr(os, name)))
            yield
        self._collect()

    def _watch(self, name, original):
        def changed(*arguments, **options):
            self._collect()
            found = original(*arguments, **options)
            if name == "fsync":
                self._sync(arguments[0])
            elif name in ("rename", "replace") and str(arguments[1]).startswith(f"{self.root}/"):
                self.renamed = [os.path.split(path) for path in arguments]
            return found

        return changed

    def _sync(self, handle):
        inode = os.fstat(handle).st_ino
        self._look()
        if inode in self.now:
            self.names[inode] = dict(self.now[inode])
        elif inode in self.held:
            self.contents[inode] = self._read(inode)

    def _look(self):
        """Note the names in all folders, and hold all files."""
        self.now, waiting = {}, [self.root]
        while waiting:
            folder = waiting.pop()
            names = self.now[os.stat(folder).st_ino] = {}
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                found = os.lstat(path)
                names[name] = found.st_ino
                if stat.S_ISDIR(found.st_mode):
                    waiting.append(path)
                elif found.st_ino not in self.held:
                    self.held[found.st_ino] = os.open(path, os.O_RDONLY)

    def _read(self, inode):
        found = os.fstat(self.held[inode])
        return os.pread(self.held[inode], found.st_size, 0), found.st_mtime_ns

    def _collect(self):
        self._look()
        synced, now = self._tree(self.names), self._tree(self.now)
        contents = {inode: self._read(inode) for inode in self.held}
        surviving = {*synced.values()} & {*now.values()}
        for tree in (synced, now):
            self._add(tree, contents)
        for tree in (synced, now, *map(self._tree, self._mixtures())):
            if surviving <= {*tree.values()}:  # otherwise half of a rename would be lost
                self._add(tree, self.contents)

    def _mixtures(self):
        """Names of which those in one folder are older or newer than those in all others."""
        for most, one in ((self.names, self.now), (self.now, self.names)):
            for folder in one:
                yield {**most, folder: one[folder]}
        if self.renamed is not None:
            (source, old), (target, new) = self.renamed
            mixture, self.renamed = {f: dict(names) for f, names in self.names.items()}, None
            mixture.get(os.stat(source).st_ino, {}).pop(old, None)
            folder = os.stat(target).st_ino
            mixture.setdefault(folder, {})[new] = self.now[folder][new]
            yield mixture

    def _tree(self, names, folder=None, prefix=""):
        found = {}
        for name, inode in names.get(folder or os.stat(self.root).st_ino, {}).items():
            found[prefix + name] = inode
            if inode not in self.held:
                found |= self._tree(names, inode, f"{prefix}{name}/")
        return found

    def _add(self, tree, contents):
        state = self._fill(tree, contents)
        # Temporary files have random names, and without a journal, a work folder is not used.
        ignored = ("/.",) if any(path.endswith("/journal") for path in state) else ("/.", ".work/")
        parts = (
            f"{path} {found and hash(found[0])}"
            for path, found in sorted(state.items())
            if not any(part in f"/{path}" for part in ignored)
        )
        self.states.setdefault(" ".join(parts), state)

    def _fill(self, tree, contents):
        return {p: contents.get(i, (b"", 0)) if i in self.held else None for p, i in tree.items()}

    def survivor(self):
        """Return what is on the disk now if nothing else survives."""
        return self._fill(self._tree(self.names), self.contents)

    def close(self):
        for handle in self.held.values():
            with suppress(OSError):
                os.close(handle)


def restore(root, state):
    """Make a folder what a power loss left of it."""
    for path, found in sorted(state.items()):
        if found is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(found[0])
            os.utime(root / path, ns=(found[1], found[1]))
