//! Servers and proxies that support only RESP2.

use std::time::Instant;

use leasehold::ErrorKind;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{
    AT_ONCE, Client, Keys, LEASE, Waiter, acquire, all_are_free, connect, one, one_beating, release,
};

pub(crate) const WITHOUT_HELLO: [&str; 3] = ["--rename-command", "HELLO", ""];

#[tokio::test]
async fn permits_are_handed_over_at_once_without_resp3() {
    let server = RedisServer::start_with(&WITHOUT_HELLO);
    let (holder, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let mut held = acquire(&one(&holder)).await;
    for client in [&other, &holder, &other] {
        let waiter = Waiter::join(&one(client)).await;
        let released = Instant::now();
        assert!(release(held).await);
        let (at, permit) = waiter.granted().await;
        assert!(at - released < AT_ONCE, "it took {:?}", at - released);
        held = permit;
    }
    assert_eq!(server.connected_clients(), 4, "two connections each");
    assert!(release(held).await);
    all_are_free(&one(&holder)).await;
}

#[tokio::test]
async fn killed_connections_are_made_anew_without_resp3() {
    let server = RedisServer::start_with(&WITHOUT_HELLO);
    let (holder, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let mut keys = Keys::of(&server);
    // First the connections that receive wake-ups, then those that send requests. The loss of the latter is noticed at
    // the next request: a holder sends one with every renewal, a waiter once a second.
    for which in [true, false] {
        let held = acquire(&one_beating(&holder, LEASE)).await;
        let waiter = Waiter::join(&one(&other)).await;
        let before = keys.connections();
        assert_eq!(before.len(), 4, "two each");
        for (id, _) in before.iter().filter(|(_, hears)| **hears == which) {
            let _: u64 = keys.ask("CLIENT", &["KILL", "ID", &id.to_string()]);
        }
        eventually(async || {
            let now = keys.connections();
            let of_old = now.keys().filter(|id| before.contains_key(id)).count();
            now.len() == 4 && of_old == 0 && now.values().filter(|hears| **hears).count() == 2
        })
        .await;
        assert!(release(held).await);
        assert!(release(waiter.permit().await).await);
        // Checked by another client with its own connections.
        all_are_free(&one(&connect(&server.url()).await)).await;
        eventually(async || keys.connections().len() == 4).await;
    }
}

#[tokio::test]
async fn a_password_is_not_repeated_without_resp3() {
    let without_hello = WITHOUT_HELLO.into_iter().chain(["--requirepass right"]);
    let server = RedisServer::start_with(&without_hello.collect::<Vec<_>>());
    let error = deadline(Client::redis(&server.url_with("", "hunter2"))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AuthFailed, "{error}");
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");

    let client = connect(&server.url_with("", "right")).await;
    assert!(release(acquire(&one(&client)).await).await);
}

#[tokio::test]
async fn a_user_without_rights_on_our_channel_is_told_so_without_resp3() {
    let user = "--user app on >secret ~* resetchannels +@all";
    let server = RedisServer::start_with(&["--rename-command", "HELLO", "", user]);
    let error = deadline(Client::redis(&server.url_with("app", "secret"))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AuthFailed, "{error}");
    assert!(error.to_string().contains("adv-sem:wake:"), "{error}");
    eventually(async || server.connected_clients() == 0).await;
}
