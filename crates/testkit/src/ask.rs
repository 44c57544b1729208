//! What the tests of this crate ask a server by hand.

use redis::{Connection, FromRedisValue};

use crate::redis_server::RedisServer;

/// A command, its words between single blanks.
#[track_caller]
pub(crate) fn ask<T: FromRedisValue>(connection: &mut Connection, command: &str) -> T {
    let mut words = command.split(' ');
    redis::cmd(words.next().unwrap()).arg(words.collect::<Vec<_>>()).query(connection).unwrap()
}

/// Every key there is, in order.
pub(crate) fn keys(server: &RedisServer) -> Vec<String> {
    let mut keys: Vec<String> = ask(&mut server.connection(), "KEYS *");
    keys.sort();
    keys
}
