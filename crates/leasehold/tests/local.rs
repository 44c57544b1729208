//! The conformance suite on the local store: a file, and a new client each time.

#![cfg(all(feature = "local", target_os = "linux"))]

use leasehold::Client;
use testkit::conformance::Store;
use testkit::local_store::LocalStore;

struct Local(LocalStore);

impl Store for Local {
    async fn client(&self) -> Client {
        Client::local(self.0.path()).await.expect("the store can be opened")
    }
}

testkit::conformance!(Local(LocalStore::new()));
