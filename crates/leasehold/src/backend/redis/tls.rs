//! The certificates that a TLS connection trusts.

use std::io;
use std::sync::Arc;

use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore};

use super::errors::RedisError;
use crate::Error;

/// Creates the TLS session for a connection to this host. Without `roots`, the public certificate authorities are
/// trusted.
pub(super) fn session(
    host: &str,
    roots: Option<&Arc<RootCertStore>>,
) -> Result<ClientConnection, RedisError> {
    let roots = roots
        .cloned()
        .unwrap_or_else(|| Arc::new(webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect()));
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let host = ServerName::try_from(host.to_owned())
        .map_err(|_| RedisError::Url("the host name is not valid"))?;
    let session = ClientConnection::new(Arc::new(config), host);
    session.map_err(|_| RedisError::Url("the TLS session could not be created"))
}

/// The error for certificate authorities that are set without TLS.
pub(super) fn unused() -> Error {
    let problem = "the URL does not use TLS: it must begin with rediss://";
    Error::invalid("ca_certificate", problem)
}

/// Reads the certificate authorities from PEM.
pub(super) fn trusted(pem: &[u8]) -> Result<RootCertStore, Error> {
    read(pem).map_err(|problem| Error::invalid("ca_certificate", problem))
}

/// Returns the authorities, or what is wrong with them. An empty list is an error, because it would trust nobody. The
/// error never repeats the PEM, which may be a private key given by mistake.
fn read(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for (number, certificate) in (1..).zip(CertificateDer::pem_slice_iter(pem)) {
        let certificate = certificate.map_err(|error| match error {
            PemError::MissingSectionEnd { .. } => format!("section {number} has no END line"),
            PemError::Base64Decode(_) => format!("section {number} is not base64"),
            _ => format!("section {number} is not PEM"),
        })?;
        let added = store.add(certificate);
        added.map_err(|_| format!("section {number} is not an X.509 certificate"))?;
    }
    if store.is_empty() {
        return Err("it contains no certificate: expected -----BEGIN CERTIFICATE-----".into());
    }
    Ok(store)
}

/// Returns why the server's certificate was not accepted and what to do about it. `None` if the error has another
/// cause.
pub(super) fn distrust(error: &io::Error) -> Option<String> {
    let cause = error.get_ref()?.downcast_ref()?;
    let rustls::Error::InvalidCertificate(reason) = cause else { return None };
    Some(match reason {
        // `BadSignature` means another authority with the same name.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the server's certificate was issued by an authority that is not trusted: \
             set that authority with ca_certificate"
                .to_owned()
        }
        reason => format!("the server's certificate was rejected: {reason}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_certificate_is_distinguished_from_other_failures() {
        let failed = |error: rustls::Error| io::Error::new(io::ErrorKind::InvalidData, error);
        let expired = failed(rustls::Error::InvalidCertificate(CertificateError::Expired));
        let why = distrust(&expired).expect("a certificate that is not accepted");
        assert_eq!(why, "the server's certificate was rejected: Expired");
        assert_eq!(distrust(&failed(rustls::Error::DecryptError)), None);
        assert_eq!(distrust(&io::ErrorKind::ConnectionReset.into()), None);
    }
}
