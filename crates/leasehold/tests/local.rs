//! Everything on one host: the conformance suite, on a file. Every client is a new one.

#![cfg(all(feature = "local", target_os = "linux"))]

use leasehold::Client;
use testkit::conformance::Store;
use testkit::local_store::LocalStore;

struct Local(LocalStore);

impl Store for Local {
    async fn client(&self) -> Client {
        Client::local(self.0.path()).await.expect("a new store")
    }
}

testkit::conformance!(Local(LocalStore::new()));
