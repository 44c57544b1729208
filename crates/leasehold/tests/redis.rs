//! The semaphore on Redis: the conformance suite, against a real server.

#![cfg(feature = "redis")]

use leasehold::Client;
use testkit::conformance::Store;
use testkit::redis_server::RedisServer;

struct Redis(RedisServer);

impl Store for Redis {
    async fn client(&self) -> Client {
        Client::redis(&self.0.url()).await.expect("the server that was just started")
    }
}

testkit::conformance!(Redis(RedisServer::start()));
