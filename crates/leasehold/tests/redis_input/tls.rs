//! Which certificates the client trusts.

use std::time::Instant;

use leasehold::{Client, Error};
use testkit::redis_server::RedisServer;
use testkit::wait::deadline;

use super::{AT_ONCE, SECRET, acquire, hand_over, one, release};

fn authority(server: &RedisServer) -> &str {
    server.ca_certificate().expect("a server that speaks TLS")
}

async fn connect(server: &RedisServer) -> Client {
    let builder = Client::redis_builder(&server.url()).ca_certificate(authority(server));
    deadline(builder.open()).await.expect("the server that was just started")
}

#[tokio::test]
async fn an_authority_of_our_own_vouches_for_the_server() {
    let server = RedisServer::start_tls(&[]);
    let (client, other) = (connect(&server).await, connect(&server).await);
    hand_over(&client, &other, "x").await;
    hand_over(&other, &client, "x").await;

    // The client reconnects with TLS.
    server.restart();
    let held = acquire(&one(&client, "x")).await;
    assert!(deadline(one(&other, "x").try_acquire()).await.unwrap().is_none());
    release(held).await;
}

#[tokio::test]
async fn an_authority_may_be_one_of_several() {
    let (server, stranger) = (RedisServer::start_tls(&[]), RedisServer::start_tls(&[]));
    let both = format!("the other\n{}and ours\n{}", authority(&stranger), authority(&server));
    let builder = Client::redis_builder(&server.url()).ca_certificate(both);
    let client = deadline(builder.open()).await.unwrap();
    release(acquire(&one(&client, "x")).await).await;
}

/// Refused at once: a retry would not make it trusted.
#[tokio::test]
async fn a_certificate_that_nobody_vouches_for_is_refused() {
    let (server, stranger) = (RedisServer::start_tls(&[]), RedisServer::start_tls(&[]));
    let builder = Client::redis_builder(&server.url_with("", SECRET));
    for builder in [builder.clone(), builder.ca_certificate(authority(&stranger))] {
        let begun = Instant::now();
        let error = deadline(builder.open()).await.unwrap_err();
        assert!(begun.elapsed() < AT_ONCE, "it took {:?}", begun.elapsed());
        assert!(matches!(error, Error::Unusable { .. }), "{error}");
        assert!(error.to_string().contains(&server.url()), "{error}");
        let advice = "an authority that is not trusted: set that authority with ca_certificate";
        assert!(error.to_string().ends_with(advice), "{error}");
        assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
    }
    assert_eq!(server.total_commands_processed(), 0);
}

#[tokio::test]
async fn an_invalid_certificate_is_refused_before_anything_is_sent() {
    let server = RedisServer::start_tls(&[]);
    let good = authority(&server);
    let cut_short = &good[..good.len() / 2];
    let garbled = good.replacen("MII", "M!I", 1);
    let no_certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let key = format!("-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----\n");
    for (pem, problem) in [
        (String::new(), "it contains no certificate"),
        (SECRET.to_owned(), "it contains no certificate"),
        (key.replace(SECRET, "AAAA"), "it contains no certificate"),
        (key.replace(SECRET, "=hunter2="), "section 1 is not base64"),
        (cut_short.to_owned(), "section 1 has no END line"),
        (garbled, "section 1 is not base64"),
        (no_certificate.to_owned(), "section 1 is not an X.509 certificate"),
        (format!("{good}{no_certificate}"), "section 2 is not an X.509 certificate"),
        (format!("{good}-----BEGIN {SECRET}"), "section 2 is not PEM"),
    ] {
        let builder = Client::redis_builder(&server.url()).ca_certificate(pem.as_bytes());
        assert!(!format!("{builder:?}").contains(SECRET), "{builder:?}");
        let error = deadline(builder.open()).await.unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { argument: "ca_certificate", .. }),
            "{error}"
        );
        assert!(error.to_string().contains(problem), "{pem}: {error}");
        assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
    }
}

#[tokio::test]
async fn a_certificate_for_a_connection_without_tls_is_refused() {
    let server = RedisServer::start_tls(&[]);
    for url in ["redis://127.0.0.1:1".to_owned(), server.unix_url()] {
        let builder = Client::redis_builder(&url).ca_certificate(authority(&server));
        let error = deadline(builder.open()).await.unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { argument: "ca_certificate", .. }),
            "{error}"
        );
        assert!(error.to_string().contains("rediss://"), "{error}");
    }
}

#[tokio::test]
async fn plain_text_to_a_server_that_speaks_tls_is_an_error() {
    let server = RedisServer::start_tls(&[]);
    let url = format!("redis://127.0.0.1:{}", server.port());
    let builder = Client::redis_builder(&url).connect_timeout(4 * AT_ONCE);
    let error = deadline(builder.open()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
}
