//! Whom a connection over TLS trusts.

use std::error::Error as _;
use std::io;
use std::sync::Arc;

use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, TlsCertificates};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore};

use crate::Error;

/// What encrypts a connection to this host. Without authorities of the user's own, those of the web are trusted.
pub(super) fn session(
    host: &str,
    insecure: bool,
    roots: Option<&Arc<RootCertStore>>,
) -> Result<ClientConnection, RedisError> {
    let invalid = |problem| RedisError::from((ErrorKind::InvalidClientConfig, problem));
    if insecure {
        return Err(invalid("a certificate that is not verified protects nobody"));
    }
    let roots = roots
        .cloned()
        .unwrap_or_else(|| Arc::new(webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect()));
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let host = ServerName::try_from(host.to_owned()).map_err(|_| invalid("no such host name"))?;
    let session = ClientConnection::new(Arc::new(config), host);
    session.map_err(|_| invalid("TLS cannot be used"))
}

/// The same place, where only these authorities, as PEM, are trusted.
pub(super) fn trust_only(
    info: ConnectionInfo,
    pem: Vec<u8>,
) -> Result<(ConnectionInfo, Arc<RootCertStore>), Error> {
    let invalid = |problem: &str| Error::invalid("ca_certificate", problem);
    if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
        return Err(invalid("there is no TLS to use it for: the URL has to begin with rediss://"));
    }
    let roots = read(&pem).map_err(|problem| invalid(&problem))?;
    let certificates = TlsCertificates { client_tls: None, root_cert: Some(pem) };
    let client = Client::build_with_tls(info, certificates);
    // What it does not like was to be found by us: its own words do not say which certificate it is.
    let client = client.map_err(|_| invalid("it cannot be used"))?;
    Ok((client.get_connection_info().clone(), Arc::new(roots)))
}

/// The authorities, or what is wrong with them. No certificate at all would be taken for trusting nobody, and the whole
/// is never repeated: it may be a private key that was given by mistake.
fn read(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for (number, certificate) in (1..).zip(CertificateDer::pem_slice_iter(pem)) {
        let certificate = certificate.map_err(|error| match error {
            PemError::MissingSectionEnd { .. } => format!("section {number} has no end"),
            PemError::Base64Decode(_) => format!("section {number} is not base64"),
            _ => format!("section {number} is not PEM"),
        })?;
        let added = store.add(certificate);
        added.map_err(|_| format!("section {number} is not an X.509 certificate"))?;
    }
    if store.is_empty() {
        return Err("there is no certificate in it: expected -----BEGIN CERTIFICATE-----".into());
    }
    Ok(store)
}

/// Why the server's certificate was not accepted, if that is what went wrong, and what to do about it.
pub(super) fn distrust(error: &RedisError) -> Option<String> {
    let source = error.source()?.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>()?;
    let source = source.downcast_ref::<io::Error>()?.get_ref()?;
    let rustls::Error::InvalidCertificate(reason) = source.downcast_ref()? else { return None };
    Some(match reason {
        // The second is another authority of the same name.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "its certificate is from an authority that is not trusted: \
             name that authority with ca_certificate"
                .to_owned()
        }
        reason => format!("its certificate is not accepted: {reason}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_not_accepted_is_told_from_other_failures() {
        let failed = |error: rustls::Error| {
            RedisError::from(io::Error::new(io::ErrorKind::InvalidData, error))
        };
        let expired = failed(rustls::Error::InvalidCertificate(CertificateError::Expired));
        let why = distrust(&expired).expect("a certificate that is not accepted");
        assert_eq!(why, "its certificate is not accepted: Expired");
        assert_eq!(distrust(&failed(rustls::Error::DecryptError)), None);
        assert_eq!(distrust(&io::Error::from(io::ErrorKind::ConnectionReset).into()), None);
    }
}
