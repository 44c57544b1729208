//! The settings of a client on Redis.

use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;

use super::locks::{LockLayout, Prefix};
use super::tls;
use crate::Error;
use crate::clock::Span;
use crate::url::{Deployment, SentinelAccess, StoreUrl};

/// The address of Redis, and how the client uses it.
#[derive(Clone)]
pub(crate) struct RedisSettings {
    pub(super) deployment: Deployment,
    /// The URL without secrets, for messages.
    pub(crate) address: String,
    /// Over TLS, the certificate authorities that are trusted instead of the public ones.
    pub(crate) roots: Option<Arc<RootCertStore>>,
    pub(crate) namespace: String,
    pub(crate) answer_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) confirm_within: Span,
    pub(crate) lock_prefix: Prefix,
    pub(crate) lock_layout: LockLayout,
    pub(crate) purpose: Purpose,
}

/// The purpose of the connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Commands. The scripts are loaded, the connection subscribes to wake-ups, and the client writes its record.
    Commands,
    /// Queries only. A user without write permission can make them.
    Reading,
}

impl RedisSettings {
    pub(crate) fn new(url: &str) -> Result<Self, Error> {
        let StoreUrl::Redis(deployment) = StoreUrl::parse(url)? else {
            let problem = "the URL is not one of Redis: expected redis://host:port";
            return Err(Error::invalid("store", problem));
        };
        Ok(Self {
            address: deployment.to_string(),
            deployment,
            roots: None,
            namespace: "adv-sem".to_owned(),
            answer_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            confirm_within: Span::from_millis(5000),
            lock_prefix: Prefix::default(),
            lock_layout: LockLayout::default(),
            purpose: Purpose::Commands,
        })
    }

    pub(super) fn only_reads(&self) -> bool {
        self.purpose == Purpose::Reading
    }

    /// Trusts only these certificate authorities (PEM) over TLS.
    pub(crate) fn trust_only(&mut self, pem: &[u8]) -> Result<(), Error> {
        if !self.deployment.has_tls() {
            return Err(tls::unused());
        }
        self.roots = Some(Arc::new(tls::trusted(pem)?));
        Ok(())
    }

    /// Sets how to connect to the sentinels, where that differs from the server.
    pub(crate) fn reach_sentinels_by(&mut self, access: &SentinelAccess) -> Result<(), Error> {
        match &mut self.deployment {
            Deployment::Sentinel(sentinels) => sentinels.reach_by(access),
            _ if *access == SentinelAccess::default() => {}
            _ => {
                let problem = "the URL names no sentinels: it must begin with redis-sentinel:// or rediss-sentinel://";
                return Err(Error::invalid("sentinel", problem));
            }
        }
        Ok(())
    }
}
