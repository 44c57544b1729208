//! A place for a store on this host, in a directory of its own that goes with it.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

#[derive(Debug)]
pub struct LocalStore {
    directory: TempDir,
}

impl LocalStore {
    /// Nothing is there yet.
    #[must_use]
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("leasehold-").tempdir();
        Self { directory: directory.expect("a directory for temporary files") }
    }

    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The directory beside the file, where the clients have theirs.
    #[must_use]
    pub fn clients(&self) -> PathBuf {
        self.directory.path().join("store.clients")
    }
}

impl Default for LocalStore {
    fn default() -> Self {
        Self::new()
    }
}
