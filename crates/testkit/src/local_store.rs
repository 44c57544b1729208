//! A path for a local store, in a temporary directory that is removed when dropped.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

#[derive(Debug)]
pub struct LocalStore {
    directory: TempDir,
}

impl LocalStore {
    /// Makes the directory. The store itself does not exist yet.
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

    /// The directory beside the store where each client has its own directory.
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
