//! The semaphore on Redis: the conformance suite, against a real server, as the user that docs/guarantees.md recommends.

#![cfg(feature = "redis")]

use leasehold::Client;
use testkit::conformance::Store;
use testkit::redis_server::RedisServer;
use testkit::users::{PASSWORD, add_users};

struct Redis(RedisServer);

impl Store for Redis {
    async fn client(&self) -> Client {
        let url = self.0.url_with("leasehold", PASSWORD);
        Client::redis(&url).await.expect("the server that was just started")
    }
}

fn server() -> RedisServer {
    let server = RedisServer::start();
    add_users(&mut server.connection());
    server
}

testkit::conformance!(Redis(server()));
