//! Passwords of servers and sentinels, and URLs that name the wrong thing.

use leasehold::{Client, Error};
use testkit::redis_sentinel::{Options, RedisSentinel};
use testkit::redis_server::RedisServer;
use testkit::wait::deadline;

use super::{SERVERS, acquire, connect, one};

#[tokio::test]
async fn servers_and_sentinels_have_passwords_of_their_own() {
    let options = Options {
        password: Some("of-the-server"),
        sentinel_password: Some("of-the-sentinels"),
        ..Options::default()
    };
    let servers = RedisSentinel::start_with(options);
    let sentinels = servers.sentinel_addresses().join(",");
    let url = format!("redis-sentinel://:of-the-server@{sentinels}/mymaster");
    let whole = format!("{url}?sentinel_password=of-the-sentinels");
    acquire(&one(&connect(&whole).await)).await.release().await.unwrap();
    let builder = Client::redis_builder(&url).sentinel_credentials(None, "of-the-sentinels");
    acquire(&one(&deadline(builder.open()).await.unwrap())).await.release().await.unwrap();

    let error = deadline(Client::redis(&url)).await.unwrap_err();
    assert!(matches!(error, Error::Denied { .. }), "{error:?}");
    assert!(error.to_string().contains("request to the sentinel"), "{error}");
    let swapped = whole.replace("of-the-server", "wrong");
    let error = deadline(Client::redis(&swapped)).await.unwrap_err();
    assert!(matches!(error, Error::Denied { .. }), "{error:?}");
    assert!(error.to_string().contains("wrong user or password"), "{error}");
    assert!(error.to_string().contains("connecting to redis://127.0.0.1:"), "{error}");
}

#[tokio::test]
async fn another_database_is_selected() {
    let client = connect(&format!("{}/3", SERVERS.url())).await;
    let held = acquire(&client.semaphore("in three", 1).build().unwrap()).await;
    let keys = SERVERS.blocking(|servers| {
        let mut connection = servers.server(servers.primary()).connection();
        redis::cmd("SELECT").arg(3).exec(&mut connection).unwrap();
        redis::cmd("KEYS").arg("*in three").query::<Vec<String>>(&mut connection).unwrap()
    });
    assert!(!keys.await.is_empty());
    held.release().await.unwrap();
}

#[tokio::test]
async fn an_error_names_the_wrong_part_of_a_url() {
    let error = async |url: String| deadline(Client::redis(&url)).await.unwrap_err().to_string();
    let unknown = SERVERS.url().replace("mymaster", "another");
    let message = error(unknown).await;
    assert!(message.contains("the sentinel knows no primary \"another\""), "{message}");

    let sentinel = &SERVERS.sentinel_addresses()[0];
    let message = error(format!("redis://{sentinel}")).await;
    assert!(
        message
            .contains(&format!("the server is a sentinel: use redis-sentinel://{sentinel}/NAME")),
        "{message}"
    );

    let plain = RedisServer::start();
    let message = error(format!("redis-sentinel://127.0.0.1:{}/mymaster", plain.port())).await;
    assert!(
        message.contains("the server is not a sentinel: use redis:// for a single server"),
        "{message}"
    );

    let url = "redis://127.0.0.1:1";
    let builder = Client::redis_builder(url).sentinel_credentials(None, "secret");
    let message = deadline(builder.open()).await.unwrap_err().to_string();
    assert!(message.contains("names no sentinels"), "{message}");
}
